"""How many accelerators packing leaves unused, against other ways to pack."""
