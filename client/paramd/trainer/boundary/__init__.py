"""Between two updates: rounds, edits, holds, moments, gradients."""
