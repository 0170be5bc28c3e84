"""`freewheel train --seeds`: the same training with several seeds, side by side."""
