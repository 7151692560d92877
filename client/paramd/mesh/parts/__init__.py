"""The methods of a mesh, by subject."""
