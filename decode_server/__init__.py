"""The decode server: the request after the gateway, from queue to last token."""
