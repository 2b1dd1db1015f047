"""The commands of `tailrace`, one file each, by what they are about."""
