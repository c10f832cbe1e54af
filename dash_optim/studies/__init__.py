"""Studies of the optimizer on a language model: each asks one question, at several settings and seeds."""
