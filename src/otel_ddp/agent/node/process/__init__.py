"""What training processes and their descendants take."""
