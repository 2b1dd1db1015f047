"""The delay log of a partition: its batches, validated, and their effect on pending rows."""
