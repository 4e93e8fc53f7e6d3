"""Worker processes that answer in JSON and never outlive the process that started them."""
