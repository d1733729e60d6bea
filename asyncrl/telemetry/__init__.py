"""What happened, and where the time went. No torch, no global recorder: a `Recorder` is made once and handed around."""
