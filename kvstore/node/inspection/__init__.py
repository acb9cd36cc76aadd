"""Answer the questions of `kvstore inspect` about one node.

In: the state of a node store, and a question from outside.
Out: plain values that can be sent and printed: no bytes of blocks, no tokens, no secrets.
Floor: of `node`, above its other modules; a store that nobody inspects never runs this.
"""
