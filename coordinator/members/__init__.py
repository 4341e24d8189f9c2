"""The members and gateways of the cluster: enrolment, certificates, challenges, expulsion."""
