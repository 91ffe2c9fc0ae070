"""The shell that brings the node to its layout and keeps watching."""
