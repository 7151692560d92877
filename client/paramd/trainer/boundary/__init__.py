"""What happens between two updates: rounds, edits, holds, moments, gradients."""
