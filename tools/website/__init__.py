"""The site of the documentation: the tree of its pages, its reference, its search."""
