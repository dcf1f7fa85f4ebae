"""What runs recorded: records, comparisons, sweeps and reports."""
