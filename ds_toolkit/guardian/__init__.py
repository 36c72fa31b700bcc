"""The process that outlives the ranks; it imports the standard library alone, and never torch."""
