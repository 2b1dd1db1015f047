"""Memory between processes: regions, words, rings, lanes, doorbells. Knows no topic's contents."""
