"""`freewheel timeline`: what every part of a run did, as a page; other pages embed it."""
