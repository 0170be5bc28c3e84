"""Federated averaging: several sites train separately and share no data; only weights and statistics travel between them."""
