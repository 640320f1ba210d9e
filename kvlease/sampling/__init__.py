"""How tokens are asked for and what is told of them, as plain values that gateway, handoff and engine share."""
