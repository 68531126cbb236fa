"""Jobs as all surfaces use them: submitted, watched, read and cancelled."""
