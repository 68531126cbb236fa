"""Jobs as all interfaces use them: submitted, watched, read and cancelled."""
