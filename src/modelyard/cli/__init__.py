"""What people type: one file a noun; heavy imports live inside the commands."""
