"""The work between two updates: rounds, edits, holds, moments, gradients."""
