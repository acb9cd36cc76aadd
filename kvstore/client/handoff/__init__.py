"""The worker's side of hand-offs: publish and fetch the blocks of a ticket."""
