"""`freewheel timeline` shows what every part of a run did. Other pages embed the timeline."""
