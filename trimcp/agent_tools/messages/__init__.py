"""What is said in the agent-tools protocol: messages, errors, manifests, and their forms in JSON and protobuf."""
