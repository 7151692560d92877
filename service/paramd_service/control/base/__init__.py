"""Settings, addresses and errors of the control plane, used by all its packages."""
