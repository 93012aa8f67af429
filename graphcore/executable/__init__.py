"""executable"""
