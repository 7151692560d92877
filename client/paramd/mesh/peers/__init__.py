"""The connections of a client: the control plane over REST, sidecars over gRPC."""
