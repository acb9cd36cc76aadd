"""A directory of several actors: which one knows which blocks, and a store's links to all of them."""
