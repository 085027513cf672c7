"""Parts shared by the two example recipes: a corpus, a dataset, a small Conformer-CTC and its scoring."""
