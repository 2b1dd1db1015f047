"""Parts of `tailrace sql`: the topics of a query, and the output of its rows."""
