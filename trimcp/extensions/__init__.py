"""What the official extensions of the protocol say: their payloads and rules, for both sides, without I/O."""
