"""Which blocks of a model are alike: proven by their state and by the operations of one traced forward."""
