"""Running kvlease in containers. Not a part of the wheel; nothing here is imported by a server."""
