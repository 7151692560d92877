"""`attach` and `detach`: the stages that put a sidecar next to a training rank."""
