"""What each file of an export holds, byte by byte. Pure."""
