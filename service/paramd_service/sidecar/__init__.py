"""The sidecar: owns one rank's arena and serves byte spans of it, each at one step."""
