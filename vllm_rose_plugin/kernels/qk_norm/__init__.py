"""RMS norm per head on q and k in one launch, alone or followed by the rotary embedding."""
