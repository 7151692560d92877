"""Settings, addresses and errors of the control plane, known to every room."""
