"""The soak: a store on two nodes, client processes that check every byte, and things that die at random."""
