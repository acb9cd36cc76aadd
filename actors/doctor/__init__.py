"""Behind `kvstore doctor`: checks that need Ray, each in a child process."""
