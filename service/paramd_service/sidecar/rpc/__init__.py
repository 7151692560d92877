"""gRPC and Unix-socket servers, their handlers, and the link to the control plane."""
