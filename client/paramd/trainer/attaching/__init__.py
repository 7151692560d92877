"""`attach` and `detach`: the stages that put a sidecar beside a training rank."""
