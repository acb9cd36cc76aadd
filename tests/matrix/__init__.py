"""Everything together: page sizes, tiers, transfers, drafts and workers, each beside a run without any cache."""
