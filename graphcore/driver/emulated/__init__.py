"""emulated"""
