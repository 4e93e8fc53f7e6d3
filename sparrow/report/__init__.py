"""Report: surfaces and plans as figures. Takes plain data, as their files hold it."""
