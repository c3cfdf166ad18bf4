"""The detectors: pure functions and classes that turn facts from journals into verdicts."""
