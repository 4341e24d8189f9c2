"""The coordinator process: everything wired together, served on two ports, stopped cleanly."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NoReturn

import structlog

from sealring.coordinator.admin.audit import AuditCalls
from sealring.coordinator.admin.deployments import DeploymentCalls
from sealring.coordinator.admin.models import ModelCalls
from sealring.coordinator.admin.nodes import NodeCalls, NodeList
from sealring.coordinator.admin.operators import OperatorCalls
from sealring.coordinator.admin.service import AdminService
from sealring.coordinator.admin.standby import StandbyCalls
from sealring.coordinator.admin.tokens import TokenCalls
from sealring.coordinator.auth.access import Access
from sealring.coordinator.auth.operators import OperatorAccess
from sealring.coordinator.init import renew_operator_bundle
from sealring.coordinator.keys import ClusterKeys, extend_root
from sealring.coordinator.members.announcer import Announcer, announced_hosts, to_members, to_newcomers
from sealring.coordinator.members.challenges import Challenges
from sealring.coordinator.members.enrolment import Enrolment
from sealring.coordinator.members.evidence import Outcomes, Verifier
from sealring.coordinator.members.expulsion import Expulsion
from sealring.coordinator.members.joincodes import JoinCodes
from sealring.coordinator.members.tokens import JoinTokens
from sealring.coordinator.nodes.diagnoses import Diagnoses
from sealring.coordinator.nodes.links import Links
from sealring.coordinator.nodes.models import Models
from sealring.coordinator.nodes.profiles import Profiles
from sealring.coordinator.nodes.questions import Questions
from sealring.coordinator.nodes.survey import Survey
from sealring.coordinator.planning.speeds import Speeds
from sealring.coordinator.rings.cluster import Cluster
from sealring.coordinator.rings.deployments import DeploymentService
from sealring.coordinator.rings.driver import ClusterDriver
from sealring.coordinator.rings.link_survey import LinkSurvey
from sealring.coordinator.rings.plans import Plans
from sealring.coordinator.rings.state import State
from sealring.coordinator.rings.traces import Traces
from sealring.coordinator.rings.views import RingViews
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.services.certificates import CertificatesService, Issuer, RenewalService
from sealring.coordinator.services.enrolment import EnrolmentService
from sealring.coordinator.services.membership import MembershipService
from sealring.coordinator.services.node_messages import NodeMessages
from sealring.coordinator.services.scheduling import SchedulingService
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.standby.copies import Copies
from sealring.coordinator.standby.follow import stand_by
from sealring.coordinator.standby.terms import check_term, depose, tell_predecessor
from sealring.coordinator.store import Store
from sealring.coordinator.store.integrity import check_stored
from sealring.coordinator.streams.proofs import Proofs
from sealring.coordinator.streams.sessions import Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.clock import Clock, awake_clock, wall_clock
from sealring.mesh.errors import SealringError
from sealring.mesh.member.joincode import Offer
from sealring.mesh.pki.certificates import Role, is_due
from sealring.mesh.roster.reader import check_roster
from sealring.mesh.rpc.server import JOINING, Server
from sealring.mesh.rpc.tls import MAX_CONNECTION_AGE_MILLISECONDS, TlsStore, server_credentials
from sealring.mesh.system.addresses import format_address, is_loopback, parse_address
from sealring.mesh.system.processes import first_of, stop_on_signals
from sealring.mesh.trust.apple import APPLE_ROOT
from sealring.v1 import membership_pb2_grpc as rpc
from sealring.v1.admin_pb2_grpc import add_AdminServicer_to_server

_STOP_GRACE_SECONDS = 2.0
_ROTATION_CHECK_SECONDS = 5.0
ADDRESS_SECONDS = 5.0
MOVE_SECONDS = 60.0
_OPTIONS = [("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MILLISECONDS)]
log = structlog.get_logger()


class Coordinator:
    """A coordinator that serves between `start` and `stop`. Raises ConfigError if its state is unusable."""

    def __init__(
        self, settings: CoordinatorSettings, *, clock: Clock = wall_clock, device_root: bytes = APPLE_ROOT
    ) -> None:
        self._device_root = device_root
        self.settings = settings
        self.port = 0
        self.join_port = 0
        self._clock = clock
        self.store = Store.open(settings.state_dir)
        try:
            self._build()
        except BaseException:
            self.store.close()
            raise

    def _checked_keys(self) -> ClusterKeys:
        """The keys, with root metadata that is extended if that is due, once the database is found sound and
        no other coordinator's."""
        now, store = self._clock(), self.store
        extended = extend_root(self.settings, now=now)
        keys = ClusterKeys.load(self.settings, now=now)
        check_stored(store)
        check_term(store)
        if extended is not None:
            log.info("root_extended", version=extended.version, expires=extended.expires)
            details = {"version": extended.version, "expires": extended.expires}
            store.audit.append(now, "coordinator", "extend_root", keys.root.cluster, details)
        return keys

    def _build(self) -> None:
        """Wires the parts together, each after those that it needs, and the services last."""
        settings, clock, store = self.settings, self._clock, self.store
        self.keys = keys = self._checked_keys()
        cluster = keys.root.cluster
        self.access = access = Access(cluster, store)
        self.publisher = publisher = RosterPublisher(store, keys, settings, clock=clock)
        self.sessions = sessions = Sessions()
        self.watchers = watchers = Watchers(store.members.names)
        speeds, links = Speeds(), Links(clock=clock)
        state = State(sessions, watchers, settings.replace_after)
        state.former.update(store.deployments.former())
        questions = Questions(sessions)
        profiles = Profiles(questions, timeout=settings.profile_timeout)
        survey = Survey(store, sessions, profiles, publisher.standing, settings, speeds, links, state.behind)
        self.cluster = made = Cluster(
            state, speeds, links, settings, store.deployments.next_epoch, awake_clock()
        )
        plans = Plans(made, store, publisher, survey, wall=clock)
        self.driver = driver = ClusterDriver(made, store, publisher, plans, wall=clock)
        self.ring_views = views = RingViews(state)
        deployments = DeploymentService(store, publisher, survey, plans, views, clock=clock)
        self.link_survey = LinkSurvey(links, sessions, questions, state, publisher.addresses_of)
        tokens = JoinTokens(store, keys.pin, self.join_addresses)
        self.join_codes = codes = JoinCodes(store, tokens, keys.pin, clock=clock)
        expulsion = Expulsion(store, publisher, sessions, watchers, codes, clock=clock)
        verifier = Verifier(cluster, views, settings, clock=clock, device_root=self._device_root)
        outcomes = Outcomes(store, publisher, driver, clock=clock)
        self.challenges = challenges = Challenges(store, sessions, verifier, outcomes, expulsion, settings)
        sessions.listeners += [driver, challenges]
        publisher.listeners += [sessions.roster_published, watchers.roster_published, driver.stored]
        self.tls = TlsStore(
            keys.server_material(settings.hosts(), lifetime=settings.certificate_lifetime, now=clock())
        )
        self.operators = operators = OperatorAccess(access, store, keys, clock=clock)
        publisher.listeners.append(operators.roster_published)
        self.admin = AdminService(
            TokenCalls(operators, store, tokens, codes, clock),
            NodeList(operators, store, publisher, sessions, watchers, links, clock),
            NodeCalls(
                operators, store, publisher, expulsion, Diagnoses(questions), clock, settings.drain_timeout
            ),
            ModelCalls(operators, store, Models(questions), clock),
            DeploymentCalls(operators, deployments, driver, Traces(questions, views)),
            OperatorCalls(operators, store, keys),
            AuditCalls(operators, store, publisher, keys),
            StandbyCalls(
                operators, Copies(store, keys, settings.state_dir), self._stand_down, publisher.stands_by
            ),
        )
        proofs = Proofs(keys, store, publisher, sessions.refused)
        messages = NodeMessages(
            store, publisher, sessions, driver, questions, challenges, cluster, clock=clock
        )
        self._membership = MembershipService(access, proofs, publisher, sessions, questions, messages)
        issuer = Issuer(keys, settings, clock=clock)
        self._certificates = CertificatesService(access, store, issuer)
        self._renewal = RenewalService(cluster, store, issuer, lambda: self.tls.current()[1].certificate)
        self._scheduling = SchedulingService(access, proofs, watchers, driver, views)
        enrolment = Enrolment(cluster, store, publisher, verifier, clock=clock)
        self._enrolment = EnrolmentService(
            enrolment, codes, keys, publisher, settings, self.main_address, clock=clock
        )
        self._work: asyncio.Task[None] | None = None
        self._deposed = asyncio.Event()

    def main_address(self) -> str:
        """The address for members, gateways and operators."""
        return self.settings.main_address(self.port)

    def join_addresses(self) -> list[str]:
        """The addresses at which machines join, the best first."""
        return [format_address(host, self.join_port) for host in self.settings.hosts()]

    async def start(self) -> None:
        """Signs the first roster of this run, binds both ports, and serves.

        Raises ConfigError (CANNOT_LISTEN), RosterError.
        """
        self._main = Server(
            [
                (rpc.add_MembershipServicer_to_server, self._membership, "sealring.v1.Membership"),
                (rpc.add_CertificatesServicer_to_server, self._certificates, "sealring.v1.Certificates"),
                (rpc.add_SchedulingServicer_to_server, self._scheduling, "sealring.v1.Scheduling"),
                (add_AdminServicer_to_server, self.admin, "sealring.v1.Admin"),
            ],
            options=_OPTIONS,
        )
        self._join = Server(
            [
                (rpc.add_EnrolmentServicer_to_server, self._enrolment, "sealring.v1.Enrolment"),
                (rpc.add_RenewalServicer_to_server, self._renewal, "sealring.v1.Renewal"),
            ],
            port=JOINING,
            options=_OPTIONS,
        )
        self.port = self._main.listen(self.settings.listen, server_credentials(self.tls))
        self.join_port = self._join.listen(
            self.settings.join_listen, server_credentials(self.tls, require_client=False)
        )
        self.publisher.addresses = self.settings.addresses(self.port)
        self.publisher.publish()
        self._operator_certificate = self.renew_operator()
        self.driver.look()  # before a gateway asks which models there are
        await self._main.start()
        await self._join.start()
        announcing = [one.run() for one in self._announcers()]
        self._work = asyncio.create_task(
            first_of(
                *announcing,
                self.publisher.renew_forever(),
                self.driver.run(),
                self.sessions.watch(self.settings.heartbeat_timeout),
                self.challenges.run(),
                self.link_survey.run(),
                self._rotate_forever(),
                self._follow_addresses(),
                tell_predecessor(self.store, self.publisher, self.settings.state_dir, self.main_address()),
                self._until_deposed(),
            )
        )
        log.info(
            "coordinator_started",
            cluster=self.keys.root.cluster,
            address=self.main_address(),
            join_port=self.join_port,
        )

    def _announcers(self) -> list[Announcer]:
        if self.settings.hidden:
            return []
        main, joining = (
            partial(announced_hosts, parse_address(one)[0])
            for one in (self.settings.listen, self.settings.join_listen)
        )
        offer = Offer(self.keys.pin, self.keys.root.cluster, ())
        return [
            to_newcomers(self.join_codes, offer, joining, self.join_port),
            to_members(self.keys.pin, self._misses_members, main, self.port),
        ]

    def _misses_members(self) -> bool:
        """Whether a node or a gateway that is enrolled has no stream to this coordinator."""
        members = self.store.members
        return any(self.sessions.find(one.id) is None for one in members.all(Role.MEMBER)) or any(
            not self.watchers.watches(one.id) for one in members.all(Role.GATEWAY)
        )

    async def _follow_addresses(self) -> NoReturn:
        """Signs a roster with this machine's addresses when they change, as when it gets another by DHCP.

        Its own operator bundle leads to the first of them. Changes are a minute apart at least, since each
        makes a roster; what fails is tried again. Without a network nothing changes: the next one may be the
        one before, and members of this machine call over loopback.
        """
        while True:
            await asyncio.sleep(ADDRESS_SECONDS)
            before, now = self.publisher.addresses, self.settings.addresses(self.port)
            if now == before or is_loopback(self.settings.hosts()[0]):
                continue
            self.publisher.addresses = now
            try:
                self.publisher.publish()
                self._operator_certificate = self.renew_operator()
            except SealringError as error:
                self.publisher.addresses = before
                log.error("addresses_not_published", reason=error.reason, why=error.message)
                continue
            log.info("coordinator_addresses_changed", addresses=now, before=before)
            await asyncio.sleep(MOVE_SECONDS)

    async def stop(self) -> None:
        """Reports NOT_SERVING, says goodbye on every stream, and stops after a short wait."""
        await self._main.set_serving(False)
        await self._join.set_serving(False)
        self.sessions.close_all("the coordinator is stopping")
        self.watchers.close_all()
        await self.driver.close()
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait((self._work,))
        await asyncio.gather(self._main.stop(_STOP_GRACE_SECONDS), self._join.stop(_STOP_GRACE_SECONDS))
        self.store.close()
        if self._work is not None:  # else the error that kept it from starting was reported
            log.info("coordinator_stopped")

    async def failed(self) -> None:
        """Waits for the coordinator's own tasks, and raises the error that ends one of them."""
        if self._work is not None:
            await asyncio.shield(self._work)

    def _stand_down(self, roster: bytes) -> None:
        depose(
            self.store,
            self.publisher.current.version,
            check_roster(roster, self.keys.root, now=self._clock()),
            roster,
        )
        self._deposed.set()

    async def _until_deposed(self) -> None:
        await self._deposed.wait()
        check_term(self.store)

    def rotate_certificates(self) -> None:
        """Renews the certificates of servers and operator that are past half of their life, or were made by
        a clock that was ahead and has come back: nobody would believe them until then."""
        now = self._clock()
        if is_due(self.tls.current()[1].certificate, now):
            lifetime = self.settings.certificate_lifetime
            self.tls.replace(self.keys.server_material(self.settings.hosts(), lifetime=lifetime, now=now))
            log.info("server_certificate_rotated")
        if self._operator_certificate and is_due(self._operator_certificate, now):
            self._operator_certificate = self.renew_operator()

    async def _rotate_forever(self) -> None:
        while True:
            try:
                self.rotate_certificates()
            except SealringError as error:  # a full disk, which may have room again
                log.error("certificates_not_rotated", reason=error.reason, why=error.message)
            await asyncio.sleep(_ROTATION_CHECK_SECONDS)

    def renew_operator(self) -> bytes | None:
        """Renews the bundle in the folder of the coordinator. None if its operator was revoked.

        Raises ConfigError (STATE_CORRUPT).
        """
        return renew_operator_bundle(
            self.settings.state_dir, self.store, self.keys, self.main_address(), now=self._clock()
        )


async def run(settings: CoordinatorSettings) -> None:
    """Serve until SIGTERM or SIGINT; as a standby, from the promotion on.

    Raises ConfigError when state or ports are unusable, and DEPOSED once another has taken over.
    """
    with stop_on_signals() as stopping:
        await first_of(stopping.wait(), stand_by(settings))
        if stopping.is_set():
            return
        coordinator = Coordinator(settings)
        try:
            await coordinator.start()
            await first_of(stopping.wait(), coordinator.failed())
        finally:
            await coordinator.stop()
