# What pint (github.com/cloudflare/pint) need not say of our rules, and why:
#
#   pint --offline --config deploy/prometheus/tests/pint.hcl lint deploy/prometheus/rules deploy/prometheus/alerts

checks {
  # A rule that reads another group's result sees that of 30 s before, at most. In one group, all rules would be
  # evaluated one after the other: at 10,000 ranks that takes 6 to 11 s of each 30 s (docs/internals/scale.md).
  disabled = ["rule/dependency"]
}

# The rule that it counts has a series for missing ranks alone.
rule {
  match {
    name = "TrainingRanksMissing"
  }
  disable = ["alerts/comparison"]
}

# A node's series has no rank, and is compared with series of nodes, which have none either.
rule {
  match {
    name = "rank:training_imbalance:ratio"
  }
  disable = ["promql/impossible"]
}

# A comparison drops NaN.
rule {
  match {
    name = "node:training_late:share30d"
  }
  disable = ["promql/nan"]
}
