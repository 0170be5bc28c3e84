"""`freewheel train --seeds` runs the same training with several seeds at the same time."""
