"""A plan of a whole program: the user's own code on ranks without data, under a virtual clock."""
