"""What a student picks: kernelspecs, their installer, and what runs inside the kernel."""
