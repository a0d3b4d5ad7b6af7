"""Scripts of AReaL's design documents in megarl's words, as near to the printed lines as can be."""
